"""Commands of `slackwater` that need a checkout."""
