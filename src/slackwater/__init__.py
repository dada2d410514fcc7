"""Slackwater: RL post-training of language models on the slack of a GPU fleet."""
