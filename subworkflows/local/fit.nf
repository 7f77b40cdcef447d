// Stores and splits → bundles: pretraining, finetuning of what it made, and training from scratch.

include { FINETUNE } from '../../modules/local/finetune'
include { PRETRAIN } from '../../modules/local/pretrain'
include { TRAIN    } from '../../modules/local/train'
include { GATHER as GATHER_FOR_FIT } from './gather'

// what a task of these is told beside files
def metaOf(run) {
    return [id: run.id, seed: run.seed, kinds: run.kinds, checkpoints: run.checkpoints]
}

workflow FIT {
    take:
    plan
    stores   // id, folder
    pairs    // id, store folder, split parquet
    things   // key, path
    scales   // id of a pair and part, the genes that are scored, table of target genes
    imported // id, folder

    main:
    // semantic tables and the gene list of a run
    asked   = (plan.runs.findAll { run -> run.mode in ['pretrain', 'train', 'finetune'] })
        .collect { run -> [run.id, run.tables.collect { mark -> mark.key } + [run.genes.key]] }
    GATHER_FOR_FIT(asked, things)
    belongs = GATHER_FOR_FIT.out.gathered.map { id, found -> tuple(id, found.dropRight(1), found.last()) }

    priors   = plan.runs.findAll { run -> run.mode == 'pretrain' }
    scratch  = plan.runs.findAll { run -> run.mode == 'train' }
    finetune = plan.runs.findAll { run -> run.mode == 'finetune' }

    // a pretraining waits for all its stores
    own = channel.fromList(priors)
        .flatMap { run -> run.stores.collect { store -> tuple(store.id, groupKey(run.id, run.stores.size())) } }
        .combine(stores, by: 0)
        .map { id, key, store -> tuple(key, tuple(id, store)) }
        .groupTuple()
        .map { key, found -> tuple("${key}".toString(), found.sort { one -> one[0] }.collect { one -> one[1] }) }

    // and for the splits of the runs that start from it
    later = priors.collectEntries { run ->
        def started = plan.runs.findAll { other -> other.init == run.id && !other.conditions }
        [(run.id): started.collect { other -> other.unit.split.id }.unique()]
    }
    awaited = later.collectMany { id, ids -> ids.collect { pair -> tuple(pair, groupKey(id, ids.size())) } }
    alone   = later.findAll { _id, ids -> !ids }.collect { id, _ids -> tuple(id, [], []) }
    held    = channel.fromList(awaited)
        .combine(pairs, by: 0)
        .map { pair, key, store, split -> tuple(key, tuple(pair, store, split)) }
        .groupTuple()
        .map { key, found -> tuple("${key}".toString(), found.sort { one -> one[0] }) }
        .map { id, found -> tuple(id, found.collect { one -> one[1] }, found.collect { one -> one[2] }) }
        .mix(channel.fromList(alone))

    PRETRAIN(
        channel.fromList(priors)
            .map { run -> tuple(run.id, run) }
            .combine(own, by: 0)
            .combine(held, by: 0)
            .combine(belongs, by: 0)
            .map { _id, run, found, heldStores, heldSplits, tables, genes ->
                tuple(metaOf(run), found, heldStores, heldSplits, tables, genes, [], run.recipe)
            }
    )
    pretrained = PRETRAIN.out.bundle.map { meta, bundle -> tuple(meta.id, bundle) }

    TRAIN(
        channel.fromList(scratch)
            .map { run -> tuple(run.id, run) }
            .combine(belongs, by: 0)
            .map { _id, run, tables, genes -> tuple(run.unit.id, run, tables, genes) }
            .combine(scales, by: 0)
            .map { _unit, run, tables, genes, scored, _targets -> tuple(run.unit.split.id, run, tables, genes, scored) }
            .combine(pairs, by: 0)
            .map { _pair, run, tables, genes, scored, store, split ->
                // all genes of the store are scored where no others are named
                tuple(metaOf(run), store, split, tables, genes, genes ? scored ?: store : scored, run.recipe)
            }
    )

    // from a bundle folder, or from what a row of the sheet made
    starts = channel.fromList(finetune.findAll { run -> !run.bundle })
        .map { run -> tuple(run.init, run) }
        .combine(pretrained.mix(imported), by: 0)
        .map { _init, run, bundle -> tuple(run, bundle) }
        .mix(channel.fromList(finetune.findAll { run -> run.bundle }).map { run -> tuple(run, run.bundle) })
    FINETUNE(
        starts.map { run, bundle -> tuple(run.id, run, bundle) }
            .combine(belongs, by: 0)
            .map { _id, run, bundle, tables, _genes -> tuple(run.unit.id, run, bundle, tables) }
            .combine(scales, by: 0)
            .map { _unit, run, bundle, tables, scored, _targets ->
                tuple(run.unit.split.id, run, bundle, tables, scored)
            }
            .combine(pairs, by: 0)
            .map { _pair, run, bundle, tables, scored, store, split ->
                def meta = metaOf(run) + [transfer: run.transfer]
                tuple(meta, store, split, bundle, tables, scored ?: store, run.recipe)
            }
    )

    bundles  = TRAIN.out.bundle.mix(FINETUNE.out.bundle, PRETRAIN.out.bundle)
    versions = PRETRAIN.out.versions.mix(TRAIN.out.versions, FINETUNE.out.versions)

    emit:
    bundles   // meta, folder
    versions
}
