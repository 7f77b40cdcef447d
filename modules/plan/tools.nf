// External methods (docs/baselines.md): what the package lists of them.

def toolFolder() {
    return file("${projectDir}/perturbdiff/baselines/external/tools")
}

// their names are modes of the samplesheet
def toolNames() {
    return toolFolder().list().findAll { entry -> entry.endsWith('.yaml') }.collect { entry -> entry - '.yaml' }.sort()
}

def kindOf(name) {
    return name == 'script' ? 'script' : name in toolNames() ? 'tool' : 'built-in'
}

// options of the row's method that it does not have; a script's own are its own matter
def optionProblems(name, options) {
    if (!(name in toolNames()) || !(options instanceof Map)) { return [] }
    def text  = toolFolder().resolve("${name}.yaml").text
    def known = (new groovy.yaml.YamlSlurper().parseText(text).settings ?: [:]).keySet()
    return options.keySet().findAll { option -> !(option in known) }.collect { option ->
        def close = known.toList().closest("${option}".toString())
        "${name} has no option '${option}'${close ? ", did you mean '${close[0]}'?" : ''}; " +
            "perturbdiff baseline show ${name} lists them"
    }
}
