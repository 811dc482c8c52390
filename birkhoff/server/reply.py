"""JSON responses: NaN and infinity become null, NumPy values are written as numbers."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def json_response(data: Any) -> Response:
    return Response(orjson.dumps(data, option=_OPTIONS), media_type="application/json")
