"""A worker that says one line and ends with a status of its own, whatever it is told."""

import sys

if __name__ == "__main__":
    print("nothing to do", flush=True)
    sys.exit(2)
