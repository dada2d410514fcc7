"""A worker that does nothing until it is ended, whatever it is told; like every worker it ends with
its agent.
"""

import signal

from slackwater.worker.process import run_worker


def wait() -> None:
    while True:
        signal.pause()


if __name__ == "__main__":
    run_worker(wait)
