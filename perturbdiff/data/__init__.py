"""Data: raw counts → store → cell sets. Each module imports only what stands above it or beside it here.

Inputs
    ``counts`` opens a file (``layouts``, ``columns``, ``obs_tables``), ``matrices`` reads its values by
    blocks of rows, ``gene_joins`` joins the genes of several files, ``labels`` turns obs into conditions
    (``schema``, ``doses``).
Preprocessing
    ``crew`` runs coarse tasks, ``passes`` cuts inputs into pieces. The passes: ``scan`` (checks, filters,
    ``tally``, ``gene_sums``), ``knockdown_filter`` (``knockdown``), ``genes`` (``hvg``, ``gene_lists``),
    ``spill``, ``gather``; ``preprocess`` puts them together. ``store_writer`` and ``shard_writer`` write.
The store
    ``store`` reads any rows (``stored_rows``, ``shards``, ``chunk_cache``; ``memory_store``,
    ``shared_memory``); ``views`` and ``store_export`` show it to other tools; ``integrity``,
    ``store_check`` and ``store_facts`` look after it; ``row_reader`` and ``expression_pass`` read it in
    constant memory for ``statistics`` (``group_pairs``, ``distances``, ``distance_tables``) and
    ``pseudobulk``.
Many studies
    ``gene_vocabulary`` (``composites``, ``study_sums``, ``vocabulary_tables``); ``gene_alignment``
    (``counted``, ``aligned_file``).
Splits and cell sets
    ``splits`` (``split_rules``, ``few_shot``); ``cell_sets`` and ``windows`` draw sets (``controls``,
    ``twins``); ``loader`` makes batches of them (``batches``, ``packed``, ``vocabulary``). ``embeddings``
    and ``named_texts``: semantic tables.
Simulation
    ``synthetic`` and the modules that begin so.

Modules named ``…_kernels`` hold compiled loops.
"""
