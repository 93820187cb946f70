from tost.explore.models import ExploredModel as ExploredModel
from tost.explore.models import open_models as open_models
from tost.explore.server import build_app as build_app
from tost.explore.server import serve as serve
