"""The public names: lazy_names reads them here, and type checkers and editors do too."""

from lm_experiments_tools.ancestor.arguments import TrainerAccelerateArgs as TrainerAccelerateArgs
from lm_experiments_tools.ancestor.arguments import TrainerArgs as TrainerArgs
from lm_experiments_tools.ancestor.notice import ACCELERATE_INSTALLED as ACCELERATE_INSTALLED
from lm_experiments_tools.ancestor.notice import HVD_INSTALLED as HVD_INSTALLED
from lm_experiments_tools.ancestor.trainer import Trainer as Trainer
from lm_experiments_tools.ancestor.trainer import TrainerAccelerate as TrainerAccelerate
from lm_experiments_tools.ancestor.utilities import get_cls_by_name as get_cls_by_name
from lm_experiments_tools.ancestor.utilities import prepare_run as prepare_run
from lm_experiments_tools.data.objectives.objective import Objective as Objective
from lm_experiments_tools.data.text.tokenizer import Tokenizer as Tokenizer
from lm_experiments_tools.data.tokens.indexed import IndexedDataset as IndexedDataset
from lm_experiments_tools.data.tokens.indexed import IndexedDatasetWriter as IndexedDatasetWriter
from lm_experiments_tools.errors import UserError as UserError
from lm_experiments_tools.optimizers import get_optimizer as get_optimizer
from lm_experiments_tools.optimizers.adafactor import Adafactor as Adafactor
from lm_experiments_tools.optimizers.adamw_scale import AdamWScale as AdamWScale
from lm_experiments_tools.recipes.finetuner import FineTuner as FineTuner
from lm_experiments_tools.recipes.pretrainer import PreTrainer as PreTrainer
from lm_experiments_tools.training.schedules import get_schedule as get_schedule

__version__: str
