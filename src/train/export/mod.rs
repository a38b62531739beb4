//! Exports a trained model: entries that training changed are written anew, the others are copied from the source.

mod item;
mod matrix;
mod peft;
mod plan;

use std::path::Path;

use self::item::{Content, Item};
use self::matrix::Exporter;
use super::beginning::Beginning;
use super::trainer::Trainer;
use crate::base::Result;
use crate::base::error::bail;
use crate::checkpoint::{
    Checkpoint, DatWriter, Encoding, ModelOptWriter, NewModel, Planned, Writer, check_not_read,
};
use crate::model::convert::{Tables, text_files};
use crate::model::training::Source;

impl Trainer {
    /// Writes the model to a directory in ModelOpt's layout, with the entries, names and encodings of the checkpoint that training began
    /// with, quantized as [`Recipe`](super::Recipe) says. Unchanged entries are copied: codes, scales and bytes. Matrices stored in NVFP4
    /// keep the codes that they are trained in, and matrices stored in bfloat16 and float32 their values; changed norms and biases are
    /// float32. Adapters are merged into their matrices. The embedding and the head are written as `tables` says; [`Tables::Auto`] writes
    /// them in the form that they are trained for. With `replace`, replaces an existing model.
    pub fn export_directory(
        &self,
        source: &Source,
        place: &Path,
        tables: Tables,
        replace: bool,
    ) -> Result<()> {
        self.new_directory(source, place, tables, replace)?
            .commit(None)
    }

    /// As [`Trainer::export_directory`], but does not move the directory into place yet.
    pub(crate) fn new_directory(
        &self,
        source: &Source,
        place: &Path,
        tables: Tables,
        replace: bool,
    ) -> Result<NewModel> {
        let host = self.device().host_cpu()?;
        let recipe = &self.config().recipe;
        let beginning = Beginning::new(source, recipe, &host)?;
        let exporter = Exporter::new(self, source, &beginning, &host);
        let items = plan::directory(&exporter, tables)?;
        let planned: Vec<Planned> = items.iter().map(Planned::from).collect();
        let metadata = source.checkpoint().metadata();
        check_not_read(place, source.checkpoint().files())?;
        let start = match replace {
            true => ModelOptWriter::replace,
            false => ModelOptWriter::create,
        };
        let mut writer = start(place, &planned, metadata)?;
        for (name, content) in text_files(&metadata.tokenizer)? {
            writer.add_file(&name, content)?;
        }
        for item in &items {
            exporter
                .write(&mut writer, item)
                .map_err(|e| e.within(&item.name))?;
        }
        writer.complete()
    }

    /// Writes the model to a `.dat` file, each tensor in its type in the file that training began with. Untrained tensors keep their bytes.
    /// That format has no global scale, so codes with one are quantized again to block scales without.
    pub fn export_dat(&self, source: &Source, place: &Path) -> Result<()> {
        let checkpoint: &dyn Checkpoint = &**source.checkpoint();
        let host = self.device().host_cpu()?;
        let beginning = Beginning::new(source, &self.config().recipe, &host)?;
        let exporter = Exporter::new(self, source, &beginning, &host);
        let mut writer: Box<dyn Writer> = Box::new(DatWriter::create_like(place, checkpoint)?);
        for entry in checkpoint.entries() {
            let parts = source.parameters_of(&entry.name);
            let moved = |id: &usize| self.parameters().may_have_moved(*id);
            let is_same = !parts.matrices.iter().any(|(id, _)| moved(id))
                && !parts
                    .vectors
                    .iter()
                    .any(|(id, _)| self.parameters().is_trained_vector(*id));
            if is_same {
                writer
                    .copy(checkpoint, entry)
                    .map_err(|e| e.within(&entry.name))?;
                continue;
            }
            if parts.matrices.len() + parts.vectors.len() > 1 && entry.encoding == Encoding::Nvfp4 {
                bail!(
                    Unsupported,
                    "{} holds several matrices in one, which is not written back; export to a directory instead",
                    entry.name
                );
            }
            let item = Item {
                name: entry.name.clone(),
                shape: entry.shape.clone(),
                encoding: entry.encoding,
                content: match parts.vectors.is_empty() {
                    true => Content::Matrices(parts.matrices),
                    false => Content::Vectors(parts.vectors),
                },
            };
            exporter
                .write_single_level(&mut *writer, &item)
                .map_err(|e| e.within(&entry.name))?;
        }
        writer.finish()
    }
}
