from tost.pretrained.box import PretrainedModel as PretrainedModel
from tost.pretrained.box import describe_pretrained as describe_pretrained
from tost.pretrained.box import find_pretrained as find_pretrained
from tost.pretrained.box import list_pretrained as list_pretrained
from tost.pretrained.box import load_pretrained as load_pretrained
