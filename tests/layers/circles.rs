//! The graph of a room: an edge goes from a file to the file that defines what it names, whatever re-exports lie between. Code that is
//! compiled only for tests makes no edge: a test may use a file that depends on the tested one.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write as _;

use crate::source::{Import, Source, Target, from_root};

/// Every module of the crate, with the targets of its names.
pub(crate) struct Crate<'a> {
    sources: &'a [Source],
    /// The source of a module, and its names.
    modules: BTreeMap<Vec<String>, (usize, Names<'a>)>,
}

type Names<'a> = BTreeMap<&'a str, Vec<&'a Target>>;

/// The target of a path.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Found {
    Module(Vec<String>),
    /// Something of this source.
    Item(usize),
}

/// Paths that are being resolved: one that returns to itself has no target.
type Trail<'a> = Vec<(Vec<String>, &'a str)>;

/// References between files of a room, keyed by both files: file, line and path.
pub(crate) type Edges = BTreeMap<(String, String), BTreeSet<(String, usize, String)>>;

impl<'a> Crate<'a> {
    pub(crate) fn new(sources: &'a [Source]) -> Crate<'a> {
        let mut modules = BTreeMap::new();
        for (index, source) in sources.iter().enumerate() {
            modules.insert(source.module(), (index, BTreeMap::new()));
        }
        let mut this = Crate { sources, modules };
        for (index, source) in sources.iter().enumerate() {
            for definition in &source.definitions {
                let exported = definition.target == Target::Exported;
                for module in [Some(&definition.module), exported.then_some(&Vec::new())] {
                    let Some(module) = module else { continue };
                    let (_, names) = this
                        .modules
                        .entry(module.clone())
                        .or_insert((index, BTreeMap::new()));
                    names
                        .entry(&definition.name)
                        .or_default()
                        .push(&definition.target);
                }
            }
        }
        this
    }

    /// Looks up `name` in `module`; with `only_module`, only items that may stand before `::`.
    fn look_up(
        &self,
        module: &[String],
        name: &'a str,
        only_module: bool,
        trail: &mut Trail<'a>,
    ) -> Vec<Found> {
        let Some((source, names)) = self.modules.get(module) else {
            return Vec::new();
        };
        let targets = names.get(name).map_or(&[][..], Vec::as_slice);
        let mut found = Vec::new();
        for target in targets {
            match target {
                Target::Module => found.push(Found::Module([module, &[name.to_owned()]].concat())),
                Target::Item => found.push(Found::Item(*source)),
                Target::Exported => found.push(Found::Item(self.exported(name))),
                Target::Alias(_) => {}
            }
        }
        if only_module && found.iter().any(|f| matches!(f, Found::Module(_))) {
            found.retain(|f| matches!(f, Found::Module(_)));
            return found;
        }
        if trail.iter().any(|(m, n)| m == module && *n == name) {
            return found;
        }
        trail.push((module.to_vec(), name));
        for target in targets {
            if let Target::Alias(path) = target {
                found.extend(self.find_on(module, path, trail));
            }
        }
        if found.is_empty() {
            for target in names.get("*").map_or(&[][..], Vec::as_slice) {
                let Target::Alias(path) = target else {
                    continue;
                };
                for inner in self.find_on(module, &path[..path.len() - 1], trail) {
                    if let Found::Module(inner) = inner {
                        found.extend(self.look_up(&inner, name, only_module, trail));
                    }
                }
            }
        }
        trail.pop();
        found
    }

    fn exported(&self, name: &str) -> usize {
        let defines = |source: &Source| {
            source
                .definitions
                .iter()
                .any(|d| d.name == name && d.target == Target::Exported)
        };
        self.sources
            .iter()
            .position(defines)
            .expect("an exported macro")
    }

    fn find(&self, module: &[String], path: &'a [String]) -> Vec<Found> {
        self.find_on(module, path, &mut Vec::new())
    }

    fn find_on(&self, module: &[String], path: &'a [String], trail: &mut Trail<'a>) -> Vec<Found> {
        let climbs = |s: &&String| ["crate", "NVFP4", "self", "super"].contains(&s.as_str());
        let skipped = path.iter().take_while(climbs).count();
        let base = from_root(module, &path[..skipped]);
        let in_crate = base.is_some();
        let mut places = BTreeSet::from([Found::Module(base.unwrap_or(module.to_vec()))]);
        let rest = &path[skipped..];
        for (i, name) in rest.iter().enumerate() {
            let mut next = BTreeSet::new();
            for place in places {
                let Found::Module(inner) = &place else {
                    // A variant, a constant or a function of a type.
                    next.insert(place);
                    continue;
                };
                if name == "*" {
                    next.insert(place);
                    continue;
                }
                let named = self.look_up(inner, name, i + 1 < rest.len(), trail);
                // An item defined by a macro has no definition to read; its module is known.
                if named.is_empty() && (in_crate || i > 0) {
                    next.extend(
                        self.modules
                            .get(inner)
                            .map(|(source, _)| Found::Item(*source)),
                    );
                }
                next.extend(named);
            }
            places = next;
        }
        places.into_iter().collect()
    }

    /// Folders under `src/` with a module, outer ones first.
    pub(crate) fn rooms(&self) -> Vec<String> {
        let folder = |s: &Source| s.path.rsplit_once('/').map(|(folder, _)| folder.to_owned());
        let rooms: BTreeSet<String> = self.sources.iter().filter_map(folder).collect();
        rooms.into_iter().collect()
    }

    /// The edges of `room`. A room within it is one node.
    pub(crate) fn edges(&self, room: &str) -> Edges {
        let mut edges = Edges::new();
        let node = |source: &Source| {
            let inner = source.path.strip_prefix(room)?.strip_prefix('/')?;
            let is_node = inner != "mod.rs" || source.defines;
            let name = inner.split('/').next().unwrap_or(inner);
            is_node.then(|| format!("{room}/{name}"))
        };
        let in_tests = |source: &Source| {
            let module = source.module();
            self.sources
                .iter()
                .flat_map(|s| &s.test_modules)
                .any(|test| module.starts_with(test))
        };
        for source in self.sources.iter().filter(|s| !in_tests(s)) {
            let Some(from) = node(source) else { continue };
            let declares = source.path.ends_with("/mod.rs");
            for named in source.named.iter().filter(|n| !n.test) {
                for found in self.find(&named.module, &named.segments) {
                    let target = match found {
                        Found::Item(target) => target,
                        // A path to a module must continue, or it would have no target.
                        Found::Module(module) if named.import != Import::No => {
                            match self.modules.get(&module) {
                                Some((target, _)) => *target,
                                None => continue,
                            }
                        }
                        Found::Module(_) => continue,
                    };
                    let target = &self.sources[target];
                    let Some(to) = node(target) else { continue };
                    let own = target.module().starts_with(&source.module());
                    let reexported = declares && named.import == Import::Public && own;
                    if from != to && !reexported {
                        let path = named.segments.join("::");
                        let place = (source.path.clone(), named.line, path);
                        edges.entry((from.clone(), to)).or_default().insert(place);
                    }
                }
            }
        }
        edges
    }
}

/// The shortest circle through `edges`, as its nodes; the first by name of several.
pub(crate) fn shortest(edges: &Edges) -> Option<Vec<String>> {
    let nodes: BTreeSet<&String> = edges.keys().map(|(from, _)| from).collect();
    nodes
        .into_iter()
        .filter_map(|start| way(edges, start, start))
        .min_by_key(Vec::len)
}

/// The shortest way along one edge or more, as the nodes before `to`.
pub(crate) fn way(edges: &Edges, from: &str, to: &str) -> Option<Vec<String>> {
    let mut before: BTreeMap<&str, &str> = BTreeMap::new();
    let mut queue = VecDeque::from([from]);
    while let Some(at) = queue.pop_front() {
        for (_, next) in edges.keys().filter(|(f, _)| f == at) {
            if next == to {
                let mut nodes = vec![at.to_owned()];
                let mut at = at;
                while at != from {
                    at = before[at];
                    nodes.push(at.to_owned());
                }
                nodes.reverse();
                return Some(nodes);
            }
            if next != from && !before.contains_key(next.as_str()) {
                before.insert(next, at);
                queue.push_back(next);
            }
        }
    }
    None
}

/// A circle with the first line of each of its imports.
pub(crate) fn show(edges: &Edges, circle: &[String]) -> String {
    let mut text = String::new();
    for (i, from) in circle.iter().enumerate() {
        let to = &circle[(i + 1) % circle.len()];
        writeln!(text, "    {}", show_edge(edges, from, to)).expect("text");
    }
    text
}

/// An edge with its first line.
pub(crate) fn show_edge(edges: &Edges, from: &str, to: &str) -> String {
    let places = &edges[&(from.to_owned(), to.to_owned())];
    let (file, line, path) = places.first().expect("an edge has a line");
    format!("{from} -> {to}: src/{file}:{line}: {path}")
}

/// The nodes that lie on circles.
pub(crate) fn in_circles(edges: &Edges) -> Vec<String> {
    let nodes: BTreeSet<&String> = edges.keys().map(|(from, _)| from).collect();
    nodes
        .into_iter()
        .filter(|node| way(edges, node, node).is_some())
        .cloned()
        .collect()
}
