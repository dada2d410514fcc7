"""The pages that the code writes are what the code says today."""

import subprocess
import sys
from pathlib import Path

from pages import ROOT

SCRIPT = ROOT / "scripts" / "write_reference.py"


def test_generated_pages_are_fresh(tmp_path: Path) -> None:
    reference = ROOT / "docs" / "reference"
    write = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import write_reference as w\n"
        f"from pathlib import Path\n"
        f"[(Path({str(tmp_path)!r}) / n).write_text(page()) for n, page in w.PAGES.items()]"
    )
    subprocess.run([sys.executable, "-c", write], check=True, timeout=120)
    written = sorted(tmp_path.iterdir())
    assert [page.name for page in written] == ["cli.md", "service-configuration.md"]
    for page in written:
        fix = f"{page.name} is not what the code says: python scripts/write_reference.py"
        assert (reference / page.name).read_text() == page.read_text(), fix
