"""Defines a run's configuration: its sections with their defaults, and the file that sets them.

Every key has a default that suits a small run on one machine. Unknown keys are refused by name,
with the nearest valid one.

Example::

    config = load_config(Path("examples/demo.toml"))
    config.train.max_staleness
"""

from deltawire.config.adapters import AdapterConfig, AdapterLineConfig, LineConfig
from deltawire.config.allocation import AllocationConfig, BandConfig
from deltawire.config.budget import BudgetConfig
from deltawire.config.fleet import TrustConfig, WorkersConfig
from deltawire.config.losses import (
    SURROGATES,
    UNCORRECTED_STALENESS,
    CorrectionConfig,
    KtoConfig,
    LengthTerm,
    LossConfig,
    PreferenceConfig,
    SurrogateTraits,
)
from deltawire.config.optimization import OptimizerConfig, ParameterGroup, ScheduleConfig
from deltawire.config.parsing import (
    MAX_CONFIG_BYTES,
    check_config,
    load_config,
    parse_config,
    read_values,
    run_config,
)
from deltawire.config.reference import ReferenceConfig
from deltawire.config.resuming import (
    RESUMABLE,
    changed_settings,
    differences,
    flatten,
    require_same,
    with_settings,
)
from deltawire.config.retention import RetainConfig
from deltawire.config.reuse import ReuseConfig
from deltawire.config.sections import (
    BuildConfig,
    FaultsConfig,
    ModelConfig,
    OnFull,
    ParityConfig,
    ParityLimits,
    ProbesConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
    WarmStartConfig,
    WarnLimits,
)
from deltawire.config.staleness import StalenessConfig
from deltawire.config.tasks import (
    ChatConfig,
    DataConfig,
    DocumentStreamConfig,
    EvaluateConfig,
    EvaluationSet,
    MessageTemplate,
    MidtrainConfig,
    MixtureEntry,
    TaskConfig,
)
from deltawire.config.thinking import ThinkingConfig, ThinkingStage

__all__ = [
    "MAX_CONFIG_BYTES",
    "RESUMABLE",
    "SURROGATES",
    "UNCORRECTED_STALENESS",
    "AdapterConfig",
    "AdapterLineConfig",
    "AllocationConfig",
    "BandConfig",
    "BudgetConfig",
    "BuildConfig",
    "ChatConfig",
    "CorrectionConfig",
    "DataConfig",
    "DocumentStreamConfig",
    "EvaluateConfig",
    "EvaluationSet",
    "FaultsConfig",
    "KtoConfig",
    "LengthTerm",
    "LineConfig",
    "LossConfig",
    "MessageTemplate",
    "MidtrainConfig",
    "MixtureEntry",
    "ModelConfig",
    "OnFull",
    "OptimizerConfig",
    "ParameterGroup",
    "ParityConfig",
    "ParityLimits",
    "PreferenceConfig",
    "ProbesConfig",
    "ReferenceConfig",
    "RetainConfig",
    "ReuseConfig",
    "RolloutConfig",
    "RunConfig",
    "ScheduleConfig",
    "StalenessConfig",
    "SurrogateTraits",
    "TaskConfig",
    "ThinkingConfig",
    "ThinkingStage",
    "TrainConfig",
    "TrustConfig",
    "WarmStartConfig",
    "WarnLimits",
    "WorkersConfig",
    "changed_settings",
    "check_config",
    "differences",
    "flatten",
    "load_config",
    "parse_config",
    "read_values",
    "require_same",
    "run_config",
    "with_settings",
]
