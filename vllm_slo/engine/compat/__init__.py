# SPDX-License-Identifier: Apache-2.0
"""The one place that knows vLLM's private names and its versions.

Each module has thin functions over names that vLLM does not promise to keep. What vLLM documents
is used where it is needed. Methods that must be overridden stay with their subclass; `overrides`
lists them.
"""
