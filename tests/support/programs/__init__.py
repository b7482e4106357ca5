"""Random graph programs: views, copies, writes, masks and attention, run eagerly and compiled, and compared."""

from programs.check import Outcome, check
from programs.grammar import dynamic_programs, programs, wrapped_programs
from programs.program import Mode, Program

__all__ = ["Mode", "Outcome", "Program", "check", "dynamic_programs", "programs", "wrapped_programs"]
