# SPDX-License-Identifier: Apache-2.0
"""The operator's configuration, profiles on disk, and the arguments that vLLM is started with."""
