"""The SDK in web applications: write tokens in signed cookies, errors as answers, metrics, a graph for each process.

`TokenCarrier` works under any framework, since it reads and makes header values. The modules beside it do the whole for
one framework each, and need that framework installed (otherwise: `FrameworkMissing`):

=========================================  ============================
`tao.client.web.starlette.StarletteGraph`  FastAPI and Starlette, `Graph`
`tao.client.web.flask.FlaskGraph`          Flask, `SyncGraph`
`tao.client.web.django.TaoMiddleware`      Django, `SyncGraph`
=========================================  ============================

`core` has what they share.
"""

from tao.client.web.core import WebCore, WebRequest, WebSettings
from tao.client.web.errors import ErrorAnswer, FrameworkMissing, NotFound, found
from tao.client.web.metrics import RequestRecord
from tao.client.web.token_cookie import MIN_KEY_BYTES, CarrierSettings, TokenCarrier

__all__ = [
    "MIN_KEY_BYTES",
    "CarrierSettings",
    "ErrorAnswer",
    "FrameworkMissing",
    "NotFound",
    "RequestRecord",
    "TokenCarrier",
    "WebCore",
    "WebRequest",
    "WebSettings",
    "found",
]
