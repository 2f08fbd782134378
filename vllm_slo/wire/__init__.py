# SPDX-License-Identifier: Apache-2.0
"""Messages between processes. Nothing here loads torch or vLLM."""
