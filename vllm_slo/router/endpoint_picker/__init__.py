# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker of a gateway: it chooses replicas by what they can promise.

It speaks the endpoint picker protocol of Kubernetes' Gateway API Inference Extension, which is
Envoy's external processing protocol over gRPC. The gateway carries the bytes.
"""
