# SPDX-License-Identifier: Apache-2.0
"""What processes say to each other; nothing here loads torch or vLLM."""
