"""A software workspace: small packages with a fault, tools for an agent, an isolated grader."""

from deltawire.envs.workspace.episode import Workspace
from deltawire.envs.workspace.problems import Case, Problem, problem
from deltawire.envs.workspace.settings import WorkspaceSettings
from deltawire.envs.workspace.tasks import WorkspaceTasks

__all__ = ["Case", "Problem", "Workspace", "WorkspaceSettings", "WorkspaceTasks", "problem"]
