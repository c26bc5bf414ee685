"""A table of losses whose gradients take every form, and the form each should take."""

from tests.engine.factored_models.architectures import (
    ARCHITECTURES as ARCHITECTURES,
)
from tests.engine.factored_models.architectures import decoder as decoder
from tests.engine.factored_models.common import CHEAPEST as CHEAPEST
from tests.engine.factored_models.common import FALLBACK as FALLBACK
from tests.engine.factored_models.common import PLAIN as PLAIN
from tests.engine.factored_models.common import score as score
from tests.engine.factored_models.common import w_only as w_only
from tests.engine.factored_models.control_flow import CONTROL_FLOW as CONTROL_FLOW
from tests.engine.factored_models.convolutions import CONVOLUTIONS as CONVOLUTIONS
from tests.engine.factored_models.convolutions import Conv as Conv
from tests.engine.factored_models.embeddings import EMBEDDINGS as EMBEDDINGS
from tests.engine.factored_models.embeddings import rows as rows
from tests.engine.factored_models.fallbacks import FALLBACKS as FALLBACKS
from tests.engine.factored_models.products import PRODUCTS as PRODUCTS
from tests.engine.factored_models.shared import SHARED as SHARED

MODELS = {
    **PRODUCTS,
    **SHARED,
    **CONTROL_FLOW,
    **FALLBACKS,
    **CONVOLUTIONS,
    **EMBEDDINGS,
    **ARCHITECTURES,
}
