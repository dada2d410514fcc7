"""A worker that does nothing until it is ended, whatever it is told."""

import signal

if __name__ == "__main__":
    signal.pause()
