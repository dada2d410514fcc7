"""guidellm: every request of its run was answered in full."""

import json
import sys
from pathlib import Path

(run,) = json.loads(Path(sys.argv[1]).read_text())["benchmarks"]
requests = run["requests"]
assert not requests["errored"], requests["errored"][:1]
assert len(requests["successful"]) >= 12, len(requests["successful"])
print(f"guidellm: {len(requests['successful'])} requests, four at a time")
