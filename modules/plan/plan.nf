// The whole plan of an execution, from its parameters, and what is done before its first task.

include { askSlurm                              } from './slurm'
include { checkPublishing                       } from './publishing'
include { checkTools; imageOf; toolImages       } from './installed'
include { compares                              } from './comparison'
include { costOf; settle; studyOf               } from './studies'
include { engineOf; takesName                   } from './site'
include { imageRecord                           } from './image'
include { countProblems; onceOf; scoringOf      } from './scoring'
include { planOf                                } from './experiment'
include { readRows                              } from './samplesheet'
include { sheetOf                               } from './single'
include { writeRecord                           } from './record'

def namesOf(baselines, choices) {
    def names   = baselines.split(',').collect { name -> name.trim() }.findAll { name -> name && name != 'none' }
    def unknown = names.findAll { name -> !(name in choices) }
    if (unknown) { error("--baselines: unknown ${unknown.join(', ')}; built in: ${choices.join(', ')}, or none") }
    return names
}

// names of external methods
def toolsOf(plan) {
    return plan.externals.findAll { one -> one.kind == 'tool' }.collect { one -> one.name }.unique().sort()
}

// given: params; metadata: the `workflow` of main.nf
def readPlan(given, metadata) {
    def checkpoints = file(given.ckpt_dir, glob: false).toAbsolutePath()
    def study   = studyOf(given.experiment)
    def sheet   = study ? study.sheet : sheetOf(given, metadata.profile.split(',') as List)
    def schema  = new groovy.json.JsonSlurper().parseText(file("${projectDir}/nextflow_schema.json").text)
    def choices = schema['$defs'].runs.properties.baselines['x-choices']
    def chosen  = settle(given, study, choices)
    def names   = namesOf(chosen.baselines, choices)
    def columns = file("${projectDir}/assets/schema_input.json")
    def rows    = readRows(sheet, columns, given.container != null)
    def rules   = new groovy.json.JsonSlurper().parseText(columns.text).items.properties.options['x-options']
    // given to tasks as inputs: the strict parser leaves parameters and ext.args out of what -resume compares
    def evaluation = [alpha: given.alpha, context_column: given.context_column].findAll { _key, value -> value != null }
    if (study) { log.info "perturbdiff: experiment ${study.name}: ${study.title}; ${costOf(study)}" }
    def options = [seed: given.data_seed, checkpoints: checkpoints, baselines: names, evaluation: evaluation,
        rules: rules]
    def plan    = planOf(rows, sheet.parent, options)
    def odd     = countProblems(plan)
    if (odd) { error("samplesheet ${sheet.name}:\n  " + odd.join('\n  ')) }
    if (!metadata.stubRun) { checkTools(toolsOf(plan), given) }   // a task that only says that it would run needs none
    return plan + [
        checkpoints: checkpoints, chosen: chosen, figures: study?.figures ?: [], sheet: sheet,
        compares: study || compares(rows),
        published: study?.figures ? file("${projectDir}/assets/paper_results.csv") : [],
        externals: plan.externals.collect { one -> one + [image: imageOf(one.name, given)] },
        scoring: scoringOf(plan, given.evaluation_seed),
        calibrations: chosen.ceiling ? onceOf(plan, 'calibration', false, given.evaluation_seed) : [],
        ceilings: chosen.ceiling ? onceOf(plan, 'ceiling.metrics', false, given.evaluation_seed) : [],
        ends: onceOf(plan, 'ends', true, given.evaluation_seed),
        shards: [sample: given.sample_shards as int, evaluation: given.evaluation_shards as int],
    ]
}

// the last that can be known to be wrong before the first task; then what tasks write to is made
def prepare(plan, given, metadata) {
    def config = nextflow.Global.session.config   // as it is after all profiles and the site's own
    if (config.process.executor == 'slurm' && given.check_slurm) { askSlurm(given, config.process, config.executor) }
    checkPublishing(given, metadata, plan.sheet, plan)
    // a container can only bind what exists
    def folders = [given.fetch_dir, "${given.outdir}/logs"].findAll().collect { name -> file(name, glob: false) }
    ([plan.checkpoints] + folders).each { folder -> folder.mkdirs() }
    def name   = given.container ? "${given.container}".toString() : null
    def named  = !name || name.contains('://') || takesName(engineOf(metadata.profile.split(',') as List))
    def image  = imageRecord(named ? name : new java.io.File(name).absolutePath, named)
    def images = name && !metadata.stubRun ? toolImages(toolsOf(plan), given) : [:]
    def known  = images.collectEntries { tool, path -> [(tool): imageRecord(path)] }
    // for beforeScript in conf/base.config
    if (image?.id) { System.setProperty('perturbdiff.image', image.id) }
    known.values().each { one -> System.setProperty("perturbdiff.image:${one.path}", one.id) }
    writeRecord(given + plan.chosen, metadata, image, known)
    file("${given.outdir}/pipeline_info/design.csv", glob: false).text = plan.design.join('\n') + '\n'
}
