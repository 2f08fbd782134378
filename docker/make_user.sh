#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The user that serves: vllm, 2000:0, as in vLLM's own image, where it may be already.
#
# Group 0 may write its caches, so that any user number works as long as the group is 0
# (OpenShift draws one).
set -eu

USER_ID=2000
HOME_FOLDER=/home/vllm

if ! getent passwd "$USER_ID" >/dev/null; then
    useradd --uid "$USER_ID" --gid 0 --create-home --home-dir "$HOME_FOLDER" vllm
fi
for folder in .cache .cache/huggingface .cache/vllm .cache/vllm-slo .config; do
    mkdir -p "$HOME_FOLDER/$folder"
done
chown -R "$USER_ID:0" "$HOME_FOLDER"
chmod -R g+rwX "$HOME_FOLDER"
