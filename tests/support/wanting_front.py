# SPDX-License-Identifier: Apache-2.0
"""A front that serves nobody and wants one more replica than it has, two at most."""

import argparse
import json
import socket
import sys


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--config")
    given = parser.parse_args()
    with socket.create_server((given.host, given.port)):
        report({"listening": f"http://{given.host}:{given.port}"})
        for line in sys.stdin:
            ready = len(json.loads(line)["replicas"])
            report({"wanted": min(ready + 1, 2), "ready": ready})


def report(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
