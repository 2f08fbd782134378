# SPDX-License-Identifier: Apache-2.0
"""What a request asks for, how it says so, and what it is told."""
