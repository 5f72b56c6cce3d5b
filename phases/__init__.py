"""The course: one folder per phase, each a runnable increment. Begin with phase_01a."""
