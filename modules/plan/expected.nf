// Everything that the sheet asks to be scored, so that the report can show what failed and why.

include { checksBefore      } from './checks'
include { isFitted; isModel } from './models'
include { logName           } from './record'

// logs of the stages that a prediction needs, in their order: the first that did not end well tells why there is none
def stagesOf(unit, checks) {
    def drawn  = unit.store.simulation ? [['SIMULATE', unit.store.simulation.id]] :
        checksBefore(unit.store, checks).collect { id -> ['CHECK', id] }
    def stages = unit.split.store ?
        (unit.store.ready ? [] : [['PREPROCESS', unit.store.id]]) + [['SPLIT', unit.split.id]] :
        [['SPLIT_FIRST', unit.split.id], ['PREPROCESS', unit.store.id]]
    return drawn + stages
}

def lineOf(unit, label, method, kind, stages, checks) {
    def logs = (stagesOf(unit, checks) + stages).collect { stage, id -> logName(stage, id) }
    return [label, method, kind, logs.join(';')].join(',')
}

// the trainings that a run's model comes from, the first one first
def trainingsOf(run, runs) {
    def starts = run.mode in ['finetune', 'sample']
    def init   = starts ? runs.find { other -> other.id == run.init && isFitted(other.mode) } : null
    return (init ? trainingsOf(init, runs) : []) + (run.mode == 'sample' ? [] : [[run.mode.toUpperCase(), run.id]])
}

def modelLine(run, label, runs, checks) {
    return lineOf(run.unit, label, run.id, 'model', trainingsOf(run, runs) + [['SAMPLE', run.id],
        ['MERGE_PREDICTIONS', "${run.id}.h5ad"],
        ['EVALUATE', "${run.id}.metrics"], ['MERGE_METRICS', "${run.id}.metrics"]], checks)
}

def baselineLine(one, label, checks) {
    return lineOf(one.unit, label, one.method, one.kind,
        [[one.kind == 'built-in' ? 'BASELINE' : 'EXTERNAL', one.id],
            ['EVALUATE', "${one.id}.metrics"], ['MERGE_METRICS', "${one.id}.metrics"]], checks)
}

// CSV of dataset, method, kind and names of logs: no folders, or another outdir would make the report again
def expectedOf(scored, runs, baselines, labels, checks) {
    def models = scored.findAll { run -> isModel(run.mode) }
        .collect { run -> modelLine(run, labels[run.unit.id], runs, checks) }
    return ['dataset,method,kind,log'] + models +
        baselines.collect { one -> baselineLine(one, labels[one.unit.id], checks) }
}
