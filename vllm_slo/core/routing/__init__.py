# SPDX-License-Identifier: Apache-2.0
"""Which replica serves a request."""
