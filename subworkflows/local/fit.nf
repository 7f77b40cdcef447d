// Stores and splits → bundles: pretraining, finetuning of what it made, and training from scratch.

include { FINETUNE } from '../../modules/local/finetune'
include { PRETRAIN } from '../../modules/local/pretrain'
include { TRAIN    } from '../../modules/local/train'

// what a task of these is told beside files
def metaOf(run) {
    return [id: run.id, seed: run.seed, kinds: run.kinds, checkpoints: run.checkpoints]
}

workflow FIT {
    take:
    plan
    stores   // id, folder
    pairs    // id, store folder, split parquet

    main:
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
        def started = plan.runs.findAll { other -> other.init == run.id }
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
            .map { _id, run, found, heldStores, heldSplits ->
                tuple(metaOf(run), found, heldStores, heldSplits, run.tables, run.recipe)
            }
    )
    pretrained = PRETRAIN.out.bundle.map { meta, bundle -> tuple(meta.id, bundle) }

    TRAIN(
        channel.fromList(scratch)
            .map { run -> tuple(run.unit.split.id, run) }
            .combine(pairs, by: 0)
            .map { _pair, run, store, split -> tuple(metaOf(run), store, split, run.tables, run.recipe) }
    )

    // from a bundle folder, or from what a row of the sheet made
    starts = channel.fromList(finetune.findAll { run -> !run.bundle })
        .map { run -> tuple(run.init, run) }
        .combine(pretrained, by: 0)
        .map { _init, run, bundle -> tuple(run, bundle) }
        .mix(channel.fromList(finetune.findAll { run -> run.bundle }).map { run -> tuple(run, run.bundle) })
    FINETUNE(
        starts.map { run, bundle -> tuple(run.unit.split.id, run, bundle) }
            .combine(pairs, by: 0)
            .map { _pair, run, bundle, store, split ->
                tuple(metaOf(run) + [transfer: run.transfer], store, split, bundle, run.tables, run.recipe)
            }
    )

    bundles  = TRAIN.out.bundle.mix(FINETUNE.out.bundle, PRETRAIN.out.bundle)
    versions = PRETRAIN.out.versions.mix(TRAIN.out.versions, FINETUNE.out.versions)

    emit:
    bundles   // meta, folder
    versions
}
