"""What every stage stands on: errors, files, outputs and their records, locks, progress, processes, devices.

Nothing here knows about cells. ``errors`` says what went wrong to a person; ``files`` writes whole files or none;
``outputs`` decides what may be replaced; ``provenance`` records what made an output; ``task_runner`` shares tasks out
to processes; ``compiled`` holds the settings of compiled loops.
"""
