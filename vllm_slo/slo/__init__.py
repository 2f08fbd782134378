# SPDX-License-Identifier: Apache-2.0
"""What a request asks for, the carriers that say so, and the answers that it gets."""
