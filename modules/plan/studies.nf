// The experiments that come along (--experiment NAME): assets/experiments/NAME.csv, a samplesheet, and NAME.yml: title,
// figures of the report, what it costs (cpu_hours or gpu_hours), and parameters that are better for it than the usual.

include { parseYaml } from './recipes'
include { kindOf    } from './tools'

def studyFolder() {
    return file("${projectDir}/assets/experiments")
}

def studyNames() {
    def files = studyFolder().list() as List
    return files.findAll { name -> name.endsWith('.yml') && "${name[0..<-4]}.csv".toString() in files }
        .collect { name -> name[0..<-4] }.sort()
}

// null: there is none
def studyOf(name) {
    if (!name) { return null }
    def known = studyNames()
    if (!(name in known)) {
        def close = known.closest("${name}".toString())
        error("--experiment: unknown '${name}'${close ? ", did you mean ${close[0]}?" : ''}; " +
            "experiments: ${known.join(', ')}")
    }
    return parseYaml(studyFolder().resolve("${name}.yml").text) +
        [name: name, sheet: studyFolder().resolve("${name}.csv")]
}

// their defaults in nextflow.config are null, so that what is given, also in a profile or a file of parameters, can be
// told from what is not: given → the experiment's → usual
def settle(given, study, choices) {
    def builtIn = choices.findAll { name -> kindOf(name) == 'built-in' }.join(',')
    def usual   = [title: 'Perturbation predictions', baselines: builtIn, ceiling: true, against: null]
    return usual.collectEntries { name, value ->
        [(name): [given[name], study?.get(name), value].find { one -> one != null }]
    }
}

def costOf(study) {
    def kind = study.gpu_hours != null ? 'gpu' : 'cpu'
    return "about ${study["${kind}_hours"]} ${kind.toUpperCase()} hours"
}
