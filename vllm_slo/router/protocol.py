# SPDX-License-Identifier: Apache-2.0
"""The private path and headers between front and replicas."""

from __future__ import annotations

from typing import Final

STATE_PATH: Final = "/vllm-slo/state"
OWN_PREFIX: Final = "x-vllm-slo-"
"""Headers that clients cannot send: the front drops them."""
TOKEN_HEADER: Final = "x-vllm-slo-token"
AGE_HEADER: Final = "x-vllm-slo-age-ms"
TICKET_HEADER: Final = "x-vllm-slo-ticket"
"""A `core.routing.tickets.Ticket`: ``FRONT:NUMBER``, or ``NUMBER`` of a front without a name."""
UNATTAINABLE_HEADER: Final = "x-vllm-slo-unattainable"
