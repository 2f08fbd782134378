# SPDX-License-Identifier: Apache-2.0
"""In which order requests without a promise are served."""
