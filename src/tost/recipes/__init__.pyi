from tost.recipes.registry import RecipeSpec as RecipeSpec
from tost.recipes.registry import config_summary as config_summary
from tost.recipes.registry import find_config as find_config
from tost.recipes.registry import find_recipe as find_recipe
from tost.recipes.registry import get_task as get_task
from tost.recipes.registry import list_configs as list_configs
from tost.recipes.registry import list_recipes as list_recipes
from tost.recipes.registry import load_config as load_config
