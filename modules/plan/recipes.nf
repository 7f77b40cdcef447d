// Recipes: a preset or YAML file with its bases merged and a row's overrides put in, cut into the sections that
// a stage depends on. A stage is given these values, so a change elsewhere in a preset does not run it again.

def sections() {
    return ['data', 'split', 'model', 'schedule', 'loss', 'train', 'sample', 'evaluate', 'simulate', 'baseline']
}

// settings that name a file, and the column that is for it; none: PREPROCESS and who else reads `data` get the file
def fileSettings() {
    return ['data.gene_aliases': '', 'evaluate.genes': 'score_genes', 'evaluate.targets': 'targets']
}

// the value of section.key in a recipe; empty if there is none
def settingOf(settings, name) {
    def (section, key) = name.tokenize('.')
    def value = settings[section] instanceof Map ? settings[section][key] : null
    return value && !("${value}" in ['none', 'None']) ? "${value}".toString() : ''
}

// the settings with the name that a file has in a task, in a folder of the work folder
def withStagedFiles(settings) {
    def name = settingOf(settings, 'data.gene_aliases')
    if (!name) { return settings }
    return settings + [data: settings.data + [gene_aliases: "aliases/${name.tokenize('/')[-1]}".toString()]]
}

def overlay(base, top) {
    def merged = [:] + base
    top.each { key, value ->
        merged[key] = (merged[key] instanceof Map && value instanceof Map) ? overlay(merged[key], value) : value
    }
    return merged
}

def parseYaml(text) {
    // the source tags of the presets (!paper 1000) say where a value comes from, not what it is
    return new groovy.yaml.YamlSlurper().parseText(text.replaceAll(/!(paper|released|ours)\b\s*/, '')) ?: [:]
}

def namesIn(folder) {
    return file("${projectDir}/perturbdiff/config/${folder}").list().findAll { entry -> entry.endsWith('.yaml') }
        .collect { entry -> entry - '.yaml' }.sort()
}

// what perturbdiff/config/variants and perturbdiff/config/sizes hold under a name
def named(kind, name) {
    def known = namesIn("${kind}s")
    if (!(name in known)) {
        throw new IllegalArgumentException("unknown ${kind} '${name}'; ${kind}s: ${known.join(', ')}")
    }
    return parseYaml(file("${projectDir}/perturbdiff/config/${kind}s/${name}.yaml").text)
}

// a layer of a recipe: its variant first, then its size, then its own values
def expand(layer) {
    def own  = layer.findAll { key, _value -> !(key in ['variant', 'size']) }
    def tree = [:]
    if (layer.variant && layer.variant != 'own') {
        def parts = named('variant', layer.variant)
        tree = overlay(parts.switches, parts.settings)
    }
    if (layer.size) { tree = overlay(tree, named('size', layer.size)) }
    return overlay(tree, own)
}

def presetFile(name, folder) {
    def packaged = file("${projectDir}/perturbdiff/config/presets/${name}.yaml", glob: false)
    if (!name.contains('/') && packaged.exists()) { return packaged }
    def beside = file("${folder}/${name}", glob: false)
    return beside.isFile() ? beside : file(name, glob: false)
}

def presetOf(row) {
    return row.preset ?: (row.mode == 'pretrain' ? 'recommended-pretrain' : 'recommended')
}

def presetNames() {
    return namesIn('presets')
}

def readPreset(name, folder, seen = []) {
    def source = presetFile(name, folder)
    if (!source.isFile()) {
        throw new IllegalArgumentException("no preset or file '${name}'; presets: ${presetNames().join(', ')}")
    }
    def tree
    try {
        tree = parseYaml(source.getText('UTF-8'))
    } catch (Exception problem) {
        throw new IllegalArgumentException("${name} is not valid YAML: ${problem.message.readLines()[0]}")
    }
    def base = tree.remove('base')
    tree = expand(tree)
    if (!base) { return tree }
    if (base in seen) { throw new IllegalArgumentException("the bases of ${name} form a circle") }
    return overlay(readPreset(base, folder, seen + [name]), tree)
}

// one override as a tree; empty if it speaks to another data set
def parseOverride(part, dataset) {
    def shorthand = part =~ /^(variant|size)\s*=\s*(\S+)$/
    if (shorthand) { return [(shorthand[0][1]): shorthand[0][2]] }
    def match = part =~ /^(?:([\w.-]+):)?(\w+)\.(\w+)(?:\.(\w+))?\s*=(.*)$/
    if (!match || !(match[0][2] in sections())) {
        throw new IllegalArgumentException("override '${part}': write section.key=value with a section of " +
            sections().join(', '))
    }
    def (only, section, key, name, text) = match[0].drop(1)
    if (name && [section, key] != ['baseline', 'options']) {
        throw new IllegalArgumentException("override '${part}': ${section}.${key} has no parts; " +
            'only baseline.options.NAME=value has')
    }
    if (only && only != dataset) { return [:] }
    def value = new groovy.yaml.YamlSlurper().parseText("value: ${text.trim()}").value
    return [(section): [(key): name ? [(name): value] : value]]
}

// 'variant=released;train.max_steps=500;kang:data.control=ctrl' → a layer for `expand`; a prefix NAME: speaks to the
// data set of that name alone
def parseOverrides(text, dataset = '') {
    def parts = (text ?: '').split(';').collect { part -> part.trim() }.findAll()
    return parts.inject([:]) { tree, part -> overlay(tree, parseOverride(part, dataset)) }
}

def ordered(value) {
    if (!(value instanceof Map)) { return value }
    return new TreeMap(value.collectEntries { key, inner -> [(key): ordered(inner)] })
}

// the chosen sections as one line of JSON, which is YAML too
def recipe(settings, names) {
    def cut = settings.findAll { key, value -> key in names && value }
    return groovy.json.JsonOutput.toJson(ordered(cut))
}

def digest(parts) {
    return parts.join('|').md5().take(8)
}
