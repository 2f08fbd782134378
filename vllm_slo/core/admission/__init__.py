# SPDX-License-Identifier: Apache-2.0
"""Which requests are promised their objectives."""
