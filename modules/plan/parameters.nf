// Parameters checked against nextflow_schema.json without a plugin: names, types, limits, characters; all errors at
// once.

include { pathProblems; projectProblems; shown } from './characters'

def camelCase(name) {
    return name.replaceAll(/-([a-z0-9])/) { m -> m[1].toUpperCase() }   // Nextflow adds fooBar for --foo-bar
}

// From Nextflow 25.10 on the strict parser gives what stands on the command line as text: 4 is '4', false is 'false'
def typed(type, value) {
    if (!(value instanceof CharSequence)) { return value }
    def text = "${value}".trim()
    if (type == 'boolean' && text in ['true', 'false']) { return text == 'true' }
    if (type == 'integer' && text.isLong()) { return text.isInteger() ? text as int : text as long }
    if (type == 'number' && text.isNumber()) { return text.toBigDecimal() }
    return value
}

def hasType(type, value) {
    if (type == 'string') { return value instanceof CharSequence }
    if (type == 'integer') { return value instanceof Integer || value instanceof Long }
    if (type == 'number') { return value instanceof Number }
    if (type == 'boolean') { return value instanceof Boolean }
    return true
}

def problemsOf(name, spec, value) {
    // --name --value is taken for two parameters
    def lost = spec.type == 'string' && value == true ? "; a value that begins with -- is written --${name}='--…'" : ''
    if (!hasType(spec.type, value)) { return ["--${name}: expected ${spec.type}, got '${value}'${lost}"] }
    def problems = []
    if (spec['enum'] && !(value in spec['enum'])) {
        problems << "--${name}: must be one of ${spec['enum'].join(', ')}, got '${value}'"
    }
    if (spec.minimum != null && value < spec.minimum) {
        problems << "--${name}: must be at least ${spec.minimum}, got ${value}"
    }
    if (spec.exclusiveMinimum != null && value <= spec.exclusiveMinimum) {
        problems << "--${name}: must be above ${spec.exclusiveMinimum}, got ${value}"
    }
    if (spec.exclusiveMaximum != null && value >= spec.exclusiveMaximum) {
        problems << "--${name}: must be below ${spec.exclusiveMaximum}, got ${value}"
    }
    if (spec.format in ['file-path', 'directory-path']) { problems += pathProblems("--${name}", value) }
    else if (value instanceof CharSequence && value =~ /\p{Cntrl}/) {
        problems << "--${name}: '${value}' has a line break or another control character: take it out"
    }
    else if (spec.pattern && value && !(value ==~ spec.pattern)) {
        def wrong = spec['x-allowed'] ? "holds other signs than ${spec['x-allowed']}" : "does not fit ${spec.pattern}"
        problems << "--${name}: '${value}' ${wrong}"
    }
    if (spec.maximum != null && value > spec.maximum) {
        problems << "--${name}: must be at most ${spec.maximum}, got ${value}"
    }
    def isRead = spec.format == 'file-path' && spec.exists
    if (isRead && value && !problems && !file(value, glob: false).exists()) {
        problems << "--${name}: no such file '${value}'"
    }
    return problems
}

def unknownName(name, known) {
    def plain = name.replaceAll(/-/, '_')
    def close = plain in known ? [plain] : known.toList().closest(plain)
    return "unknown parameter --${name}${close ? ", did you mean --${close[0]}?" : ''}".toString()
}

// what to run is told in one of two ways
def sourceProblems(given) {
    if (given.input && given.experiment) { return ['--input and --experiment: give one of them'] }
    return given.input || given.experiment ? [] :
        ['--input is required: a samplesheet or one file of counts; or --experiment NAME']
}

// The parameters, each of the type that the schema says. values: `params`; metadata: the `workflow` of main.nf, for the
// folders that nobody gives
def readParameters(values, schemaFile, metadata) {
    def schema = new groovy.json.JsonSlurper().parseText(schemaFile.text)
    def groups = schema['$defs'].values()
    def known  = groups.inject([:]) { all, group -> all + group.properties }
    def given  = values.collectEntries { name, value -> [name, typed(known[name]?.type, value)] }
    // --foo-bar also appears as fooBar: reported once, under the name that was given
    def twins  = given.keySet().findAll { name -> name.contains('-') }.collect { name -> camelCase(name) }
    // institutional profiles set parameters of their own, which nobody gave
    def ours   = { name -> !given.custom_config_base || "${metadata.commandLine}".contains("--${name}") }
    def errors = given.keySet().findAll { name -> !(name in known) && !(name in twins) && ours.call(name) }
        .collect { name -> unknownName(name, known.keySet()) }
    errors += sourceProblems(given) + groups.collectMany { group -> group.required ?: [] }
        .findAll { name ->
            given[name] == null || given[name] == '' || given[name] == true && known[name].type == 'string'
        }
        .collect { name -> "--${name} is required".toString() }
    errors += known.findAll { name, _spec -> given[name] != null && !(given[name] == '') }
        .collectMany { name, spec -> problemsOf(name, spec, given[name]) }
    errors += pathProblems('-work-dir', metadata.workDir) +
        pathProblems('the folder that Nextflow was started in,', metadata.launchDir) +
        projectProblems(metadata.projectDir)
    if (errors) {
        error("the parameters do not fit (see docs/workflow.md):\n  " +
            errors.collect { problem -> shown(problem) }.unique().join('\n  '))
    }
    return given
}
