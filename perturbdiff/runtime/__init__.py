"""Services for every stage: errors, files, outputs and their records, locks, progress, processes, devices.

Nothing here knows about cells. ``errors`` explains failures to the user. ``files`` writes complete files or none.
``outputs`` decides what may be replaced. ``provenance`` records how an output was made. ``task_runner`` distributes
tasks over processes. ``seeds`` derives random generators. ``compiled`` holds the settings of compiled loops.
"""
