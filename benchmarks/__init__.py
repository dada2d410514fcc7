"""Measurements behind `slackwater bench NAME`: each module has one `run(options) -> figures`."""
