# SPDX-License-Identifier: Apache-2.0
"""Exit with 0 if the server of this container is healthy: for HEALTHCHECK.

VLLMSLO_HEALTH_URL says where to ask if the server does not listen on port 8000.
"""

import os
import sys
import urllib.request

url = os.environ.get("VLLMSLO_HEALTH_URL", "http://127.0.0.1:8000/health")
try:
    # The server is in this container: a proxy that is configured for others is not asked.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    opener.open(url, timeout=4).close()  # raises where the status is an error
except (OSError, ValueError) as error:
    sys.exit(f"{url}: {error}")
