// Whether the external methods are where tasks will look for them, told before the first task.

include { isImage    } from './site'
include { toolFolder } from './tools'

// where `perturbdiff baseline install` puts environments: perturbdiff/baselines/external/tool_environments.py
def environments() {
    def own  = System.getenv('PD_BASELINES')
    def data = System.getenv('XDG_DATA_HOME') ?: "${System.getProperty('user.home')}/.local/share"
    return new java.io.File(own ?: "${data}/perturbdiff/baselines")
}

// an environment carries the digest of its lock, and the record that it is complete
def isInstalled(name, root) {
    def sha    = java.security.MessageDigest.getInstance('SHA-256')
    def lock   = sha.digest(toolFolder().resolve("${name}.lock").bytes).encodeHex().toString()
    def places = root.listFiles()?.findAll { place ->
        place.name.startsWith("${name}-") && place.name.endsWith("-${lock.take(8)}")
    } ?: []
    return places.any { place -> new java.io.File(place, 'installed.json').exists() }
}

// images of the tools: --baseline_images, else beside the image of all other tasks
def imageFolder(given) {
    if (given.baseline_images) { return new java.io.File("${given.baseline_images}").absoluteFile }
    if (!given.container || "${given.container}".contains('://')) { return null }
    return new java.io.File("${given.container}").absoluteFile.parentFile
}

// name → path
def toolImages(names, given) {
    def folder = imageFolder(given)
    return names.collectEntries { name -> [(name): new java.io.File(folder, "perturbdiff-${name}.sif").path] }
}

// what EXTERNAL runs in: a tool in its own image, a user's script in that of all other tasks
def imageOf(name, given) {
    if (!given.container) { return null }
    if (name != 'script') { return toolImages([name], given)[name] }
    def image = "${given.container}".toString()
    return image.contains('://') ? image : new java.io.File(image).absolutePath
}

// names: of the tools that the runs need; root: where their environments are, without a container
def toolProblems(names, given, root) {
    if (!names) { return [] }
    if (!given.container) {
        return names.findAll { name -> !isInstalled(name, root) }
            .collect { name -> "${name} is not installed in ${root}: perturbdiff baseline install ${name}" }
    }
    if (!imageFolder(given)) {
        return ["${names.join(', ')}: an image in a registry has no others beside it: --baseline_images FOLDER"]
    }
    return toolImages(names, given).collectMany { name, path ->
        def image = new java.io.File("${path}")
        if (!image.exists()) {
            return ["${name}: there is no image ${path}: bin/build-image --baseline ${name} ${path}"]
        }
        return isImage(image) ? [] : ["${path} is no Apptainer image: bin/build-image --baseline ${name} ${path}"]
    }
}

def checkTools(names, given) {
    def problems = toolProblems(names, given, environments())
    if (problems) { error("external methods are missing (see docs/baselines.md):\n  " + problems.join('\n  ')) }
}
