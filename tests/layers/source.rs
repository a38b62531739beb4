//! One source file in the form that the rules read: the paths that it names, the definitions of its modules, and its words.

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, Expr, Item, UseTree, Visibility};

/// A path that a source names, written out: a branch of a `{}` tree is a path of its own, and a glob ends with `*`.
#[derive(Clone, Debug)]
pub(crate) struct Named {
    pub(crate) line: usize,
    /// The module that names it.
    pub(crate) module: Vec<String>,
    pub(crate) segments: Vec<String>,
    pub(crate) import: Import,
    /// Only tests are compiled with it.
    pub(crate) test: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Import {
    /// A private `use`.
    Private,
    /// A `use` that others see.
    Public,
    /// A path in a type, an expression, a pattern or a macro.
    No,
}

/// A name of a module.
#[derive(Clone, Debug)]
pub(crate) struct Definition {
    pub(crate) module: Vec<String>,
    pub(crate) name: String,
    pub(crate) target: Target,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// A module with this name, in this file or another one.
    Module,
    /// Anything else that is defined here.
    Item,
    /// The target of a `use`, as its module sees it.
    Alias(Vec<String>),
    /// A macro that is also at the root of the crate.
    Exported,
}

/// A token without its place in the tree; an opening delimiter stands for its group.
pub(crate) struct Word {
    pub(crate) text: String,
    pub(crate) line: usize,
}

/// A source file by its place under `src/`.
pub(crate) struct Source {
    pub(crate) path: String,
    pub(crate) named: Vec<Named>,
    pub(crate) definitions: Vec<Definition>,
    pub(crate) words: Vec<Word>,
    /// Whether it holds more than modules and imports.
    pub(crate) defines: bool,
    /// Modules in other files that only tests are compiled with.
    pub(crate) test_modules: Vec<Vec<String>>,
}

impl Source {
    /// Panics where `text` is no Rust.
    pub(crate) fn new(path: &str, text: &str) -> Source {
        let file = syn::parse_file(text).unwrap_or_else(|e| panic!("src/{path}: {e}"));
        let mut words = Vec::new();
        flatten(text.parse().expect("what was parsed"), &mut words);
        let mut reader = Reader {
            module: module_of(path),
            ..Reader::default()
        };
        reader.visit_file(&file);
        let defines = |item: &Item| !matches!(item, Item::Mod(m) if m.content.is_none() || for_tests(&m.attrs));
        Source {
            path: path.to_owned(),
            named: reader.named,
            definitions: reader.definitions,
            words,
            defines: file
                .items
                .iter()
                .any(|item| defines(item) && !matches!(item, Item::Use(_))),
            test_modules: reader.test_modules,
        }
    }

    pub(crate) fn module(&self) -> Vec<String> {
        module_of(&self.path)
    }
}

/// The path of a file's module: `["cpu", "avx2"]`; empty for `lib.rs` and `main.rs`.
fn module_of(path: &str) -> Vec<String> {
    path.trim_end_matches(".rs")
        .split('/')
        .filter(|part| !["mod", "lib", "main"].contains(part))
        .map(str::to_owned)
        .collect()
}

/// `segments` from the root of the crate, where `module` names them so; `None` where they are relative to `module` itself.
pub(crate) fn from_root(module: &[String], segments: &[String]) -> Option<Vec<String>> {
    let mut base = module.to_vec();
    let climb = segments
        .iter()
        .take_while(|s| ["crate", "NVFP4", "self", "super"].contains(&s.as_str()))
        .inspect(|s| match s.as_str() {
            "super" => drop(base.pop()),
            "self" => {}
            _ => base.clear(),
        })
        .count();
    (climb > 0).then(|| {
        base.into_iter()
            .chain(segments[climb..].iter().cloned())
            .collect()
    })
}

fn flatten(tokens: TokenStream, words: &mut Vec<Word>) {
    for token in tokens {
        let line = token.span().start().line;
        let mut word = |text: String| words.push(Word { text, line });
        match token {
            TokenTree::Group(group) => {
                word(opening(group.delimiter()).to_owned());
                flatten(group.stream(), words);
            }
            TokenTree::Ident(ident) => word(ident.to_string()),
            TokenTree::Punct(mark) => word(mark.to_string()),
            TokenTree::Literal(literal) => word(literal.to_string()),
        }
    }
}

fn opening(delimiter: Delimiter) -> &'static str {
    match delimiter {
        Delimiter::Parenthesis => "(",
        Delimiter::Brace => "{",
        Delimiter::Bracket => "[",
        Delimiter::None => "",
    }
}

fn for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("test")
            || attribute.path().is_ident("cfg")
                && matches!(&attribute.meta, syn::Meta::List(list) if {
                    let words: Vec<String> = list.tokens.clone().into_iter().map(|t| t.to_string()).collect();
                    words.first().is_some_and(|w| w == "test")
                })
    })
}

#[derive(Default)]
struct Reader {
    module: Vec<String>,
    test: bool,
    named: Vec<Named>,
    definitions: Vec<Definition>,
    test_modules: Vec<Vec<String>>,
}

impl Reader {
    fn name(&mut self, line: usize, segments: Vec<String>, import: Import) {
        self.named.push(Named {
            line,
            module: self.module.clone(),
            segments,
            import,
            test: self.test,
        });
    }

    fn define(&mut self, name: String, target: Target) {
        self.definitions.push(Definition {
            module: self.module.clone(),
            name,
            target,
        });
    }

    fn import(&mut self, tree: &UseTree, before: &[String], import: Import) {
        let joined = |name: &syn::Ident| {
            let mut segments = before.to_vec();
            // `self` at the end of a tree names the tree's own path.
            if before.is_empty() || name != "self" {
                segments.push(name.to_string());
            }
            segments
        };
        let (line, name, segments) = match tree {
            UseTree::Path(path) => {
                return self.import(&path.tree, &joined(&path.ident), import);
            }
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.import(tree, before, import);
                }
                return;
            }
            UseTree::Name(leaf) => {
                let segments = joined(&leaf.ident);
                let name = segments.last().cloned().unwrap_or_default();
                (leaf.ident.span(), name, segments)
            }
            UseTree::Rename(leaf) => (
                leaf.ident.span(),
                leaf.rename.to_string(),
                joined(&leaf.ident),
            ),
            UseTree::Glob(leaf) => {
                let segments = [before, &["*".to_owned()]].concat();
                (leaf.star_token.spans[0], "*".to_owned(), segments)
            }
        };
        self.define(name, Target::Alias(segments.clone()));
        self.name(line.start().line, segments, import);
    }

    /// The paths in a macro's arguments, which are not Rust syntax.
    fn scan(&mut self, tokens: TokenStream, before: &[String]) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mark = |at: usize, mark: char| matches!(tokens.get(at), Some(TokenTree::Punct(p)) if p.as_char() == mark);
        let mut at = 0;
        while at < tokens.len() {
            match &tokens[at] {
                TokenTree::Group(group) => self.scan(group.stream(), &[]),
                TokenTree::Ident(first)
                    if at == 0 || !(mark(at - 1, '.') || mark(at - 1, '\'')) =>
                {
                    let line = first.span().start().line;
                    let mut segments = before.to_vec();
                    segments.push(first.to_string());
                    while mark(at + 1, ':') && mark(at + 2, ':') {
                        match tokens.get(at + 3) {
                            Some(TokenTree::Ident(next)) => segments.push(next.to_string()),
                            Some(TokenTree::Group(tree)) => {
                                self.scan(tree.stream(), &segments);
                                segments.clear();
                            }
                            _ => break,
                        }
                        at += 3;
                    }
                    let called = matches!(tokens.get(at + 1), Some(TokenTree::Group(g)) if g.delimiter() == Delimiter::Parenthesis);
                    if !segments.is_empty() && (called || is_name(&segments)) {
                        self.name(line, segments, Import::No);
                    }
                }
                _ => {}
            }
            at += 1;
        }
    }
}

/// Whether a path names an item wherever it stands: a lone lower-case word may be a variable.
fn is_name(segments: &[String]) -> bool {
    segments.len() > 1 || segments[0].starts_with(|c: char| c.is_uppercase())
}

fn segments(path: &syn::Path) -> Vec<String> {
    path.segments.iter().map(|s| s.ident.to_string()).collect()
}

fn line(path: &syn::Path) -> usize {
    path.segments[0].ident.span().start().line
}

impl<'ast> Visit<'ast> for Reader {
    fn visit_item(&mut self, item: &'ast Item) {
        let (attributes, name) = match item {
            Item::Const(i) => (&i.attrs, Some(&i.ident)),
            Item::Enum(i) => (&i.attrs, Some(&i.ident)),
            Item::Fn(i) => (&i.attrs, Some(&i.sig.ident)),
            Item::Static(i) => (&i.attrs, Some(&i.ident)),
            Item::Struct(i) => (&i.attrs, Some(&i.ident)),
            Item::Trait(i) => (&i.attrs, Some(&i.ident)),
            Item::Type(i) => (&i.attrs, Some(&i.ident)),
            Item::Union(i) => (&i.attrs, Some(&i.ident)),
            Item::Impl(i) => (&i.attrs, None),
            Item::Use(i) => (&i.attrs, None),
            Item::Mod(i) => (&i.attrs, None),
            Item::Macro(i) => (&i.attrs, None),
            _ => return visit::visit_item(self, item),
        };
        if let Some(name) = name {
            self.define(name.to_string(), Target::Item);
        }
        let before = self.test;
        self.test |= for_tests(attributes);
        visit::visit_item(self, item);
        self.test = before;
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        self.define(item.ident.to_string(), Target::Module);
        self.module.push(item.ident.to_string());
        if item.content.is_none() && self.test {
            self.test_modules.push(self.module.clone());
        }
        visit::visit_item_mod(self, item);
        self.module.pop();
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let import = match item.vis {
            Visibility::Inherited => Import::Private,
            _ => Import::Public,
        };
        self.import(&item.tree, &[], import);
    }

    fn visit_item_macro(&mut self, item: &'ast syn::ItemMacro) {
        if let Some(name) = &item.ident {
            let exported = item.attrs.iter().any(|a| a.path().is_ident("macro_export"));
            let target = if exported {
                Target::Exported
            } else {
                Target::Item
            };
            self.define(name.to_string(), target);
        }
        visit::visit_item_macro(self, item);
    }

    fn visit_macro(&mut self, called: &'ast syn::Macro) {
        self.visit_path(&called.path);
        self.scan(called.tokens.clone(), &[]);
    }

    fn visit_expr_call(&mut self, call: &'ast syn::ExprCall) {
        if let Expr::Path(function) = &*call.func
            && function.path.get_ident().is_some()
            && !is_name(&segments(&function.path))
        {
            self.name(line(&function.path), segments(&function.path), Import::No);
        }
        visit::visit_expr_call(self, call);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() && is_name(&segments(path)) {
            self.name(line(path), segments(path), Import::No);
        }
        visit::visit_path(self, path);
    }

    /// A visibility is not a reference.
    fn visit_vis_restricted(&mut self, _: &'ast syn::VisRestricted) {}
}
