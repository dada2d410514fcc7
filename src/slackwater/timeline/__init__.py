"""Who ran where and when, drawn: pictures and Perfetto traces."""
