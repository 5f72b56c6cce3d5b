"""The course: one folder a phase, each a runnable increment. Begin with phase_01a."""
