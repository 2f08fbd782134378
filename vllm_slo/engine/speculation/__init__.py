# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of speculation: trees, chains, draft models and draft servers."""
