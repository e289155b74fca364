"""The recipe: one typed object that says everything about a run.

The docstring under each field is the help text shown everywhere. Validation here looks at values only.
"""

from penstock.engine.config.data import CONVERSATIONS as CONVERSATIONS
from penstock.engine.config.data import DataConfig as DataConfig
from penstock.engine.config.effects import idle_notes as idle_notes
from penstock.engine.config.effects import require_effect as require_effect
from penstock.engine.config.effects import whole_document_notes as whole_document_notes
from penstock.engine.config.grpo import COMMAND as COMMAND
from penstock.engine.config.grpo import SAMPLED as SAMPLED
from penstock.engine.config.grpo import GrpoConfig as GrpoConfig
from penstock.engine.config.grpo import reward_function as reward_function
from penstock.engine.config.model import AdapterConfig as AdapterConfig
from penstock.engine.config.model import ModelConfig as ModelConfig
from penstock.engine.config.preference import LOSS_TYPES as LOSS_TYPES
from penstock.engine.config.preference import PREFERENCES as PREFERENCES
from penstock.engine.config.preference import PreferenceConfig as PreferenceConfig
from penstock.engine.config.recipe import AfterConfig as AfterConfig
from penstock.engine.config.recipe import Recipe as Recipe
from penstock.engine.config.recipe import SamplesConfig as SamplesConfig
from penstock.engine.config.recipe import changed_fields as changed_fields
from penstock.engine.config.recipe import config_digest as config_digest
from penstock.engine.config.recipe import dcp_folder as dcp_folder
from penstock.engine.config.recipe import dcp_folders as dcp_folders
from penstock.engine.config.recipe import drive_folders as drive_folders
from penstock.engine.config.recipe import given_fields as given_fields
from penstock.engine.config.recipe import state_folder as state_folder
from penstock.engine.config.storage import PART_STEP as PART_STEP
from penstock.engine.config.storage import BudgetConfig as BudgetConfig
from penstock.engine.config.storage import StorageConfig as StorageConfig
from penstock.engine.config.train import TrainConfig as TrainConfig
from penstock.engine.config.values import MOST_LAYERS as MOST_LAYERS
from penstock.engine.config.values import MOST_SIZE as MOST_SIZE
from penstock.engine.config.values import MOST_STEPS as MOST_STEPS
from penstock.engine.config.values import MOST_TOKENS as MOST_TOKENS
from penstock.engine.config.values import Budget as Budget
from penstock.engine.config.values import Share as Share
from penstock.engine.config.values import nearest as nearest
from penstock.engine.config.values import parse_bytes as parse_bytes
