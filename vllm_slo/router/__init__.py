# SPDX-License-Identifier: Apache-2.0
"""Several replicas behind one port: the front, the replicas' processes, and Ray around them."""
