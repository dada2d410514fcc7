"""Distribution of versions: published in buckets, visible when complete, pulled on demand."""
