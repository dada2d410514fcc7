"""The Tinker API's protobuf schema, from the SDK's generated file.

Importing the `tinker` package itself would load PyTorch into the service.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from slackwater.model.errors import RefusedError

_MODULE = "slackwater_tinker_public_pb2"


def load_schema() -> Any:
    """The generated module `tinker.proto.tinker_public_pb2`."""
    if _MODULE in sys.modules:
        return sys.modules[_MODULE]
    package = importlib.util.find_spec("tinker")
    if package is None or package.origin is None:
        raise RefusedError("the package tinker is missing: pip install 'slackwater[serve]'")
    file = Path(package.origin).parent / "proto" / "tinker_public_pb2.py"
    spec = importlib.util.spec_from_file_location(_MODULE, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise RefusedError(f"the installed tinker has no {file.name}: install tinker>=0.36")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[_MODULE] = module
    return module
