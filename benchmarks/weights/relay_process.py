"""A relay process: `python -m benchmarks.weights.relay_process --memory-gb 2`.

The fleet's secret comes in the environment. It prints its address as one JSON line and serves until
its standard input ends.
"""

import argparse
import json
import os
import sys

from slackwater.model.errors import ConfigError
from slackwater.weights.relay.bucket_store import BucketStore
from slackwater.weights.relay.server import RelayServer

SECRET_VARIABLE = "SLACKWATER_WORKER_SECRET"  # as workers get it


def main() -> None:
    parser = argparse.ArgumentParser(description="A relay for weight versions.")
    parser.add_argument("--host", default="127.0.0.1", help="address that receivers can reach")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--memory-gb", type=float, default=64.0, help="most memory for buckets")
    parser.add_argument("--node", default="", help="name of this machine")
    parser.add_argument("--shared", action="store_true", help="share memory with this machine")
    options = parser.parse_args()
    secret = os.environ.get(SECRET_VARIABLE, "")
    if not secret:
        raise ConfigError.of(SECRET_VARIABLE, secret, "must hold the fleet's secret")
    shelf = BucketStore(int(options.memory_gb * (1 << 30)), options.shared)
    server = RelayServer(
        shelf, secret.encode(), host=options.host, port=options.port, node=options.node
    )
    sys.stdout.write(json.dumps({"host": server.address[0], "port": server.address[1]}) + "\n")
    sys.stdout.flush()
    try:
        while sys.stdin.read(1 << 16):
            pass
    finally:
        server.close()
        shelf.close_all()


if __name__ == "__main__":
    main()
